"""The GPU path, in Triton. `backend` is a tensors.Backend; nothing is imported here, so that
`support` can be read without torch and triton.
"""
