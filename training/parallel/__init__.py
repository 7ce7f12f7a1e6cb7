"""One process, DDP, ZeRO and FSDP behind one class, and the memory each needs."""
