"""What no algorithm changes. Import runtime.distributed before PyTorch, because it sets what that reads."""
