"""What takes many runs to answer: goodput, sweeps, turning points, plans, published results."""
