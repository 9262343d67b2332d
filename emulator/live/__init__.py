"""Real time: clocks, devices, sockets and the processes that carry out what the core decides."""
