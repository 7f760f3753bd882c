"""Recording kept sets where tokens are sampled. The rest of the service knows `mark`, `WIDTH` and CSR
only.
"""
