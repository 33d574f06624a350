"""The compute process. Only here does the service import torch."""
