"""What every training job shares: chats -> tokens and masks, packing, losses, the loop,
checkpoints, parallelism, tracking, stages.
"""
