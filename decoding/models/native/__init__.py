"""The native backend: Llama, Mistral, Qwen2 and Qwen3 in few, small operations."""
