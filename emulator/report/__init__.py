"""From run directories to tables, JSON and pages."""
