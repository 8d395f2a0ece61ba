"""A simulated cluster: steps of training by thousands of workers in virtual time, vectorised over the workers."""
