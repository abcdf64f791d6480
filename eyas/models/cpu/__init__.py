"""Float32 models on the CPU: linear layers over weights packed for oneDNN. Knows modules and tensors only."""
