"""`fusedce demo`: one model trained three ways, and the comparison."""
