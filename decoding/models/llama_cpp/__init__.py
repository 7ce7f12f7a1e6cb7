"""The llama.cpp backend: models in GGUF files, quantised ones too, run by llama.cpp's library."""
