"""The search spaces: hyper-parameters (`dimensions`) and architectures (`architectures`)."""
