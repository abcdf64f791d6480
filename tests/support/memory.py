"""Settings under which the memory of a process shows what leaks."""

# torch and oneDNN each keep 1,024 compiled products, one for each number of rows: about 250 MiB. Read when torch is loaded.
FEW_PRODUCTS = {"LRU_CACHE_CAPACITY": "8", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
