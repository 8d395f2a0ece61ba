"""What is searched: hyper-parameters (`dimensions`) and architectures (`base`, `choices`)."""
