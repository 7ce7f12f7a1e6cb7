"""GGUF files of the Llama family, read as a Hugging Face folder's config, weights and tokenizer."""
