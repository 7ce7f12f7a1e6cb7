"""What people talk to: chats in a terminal and runs over prompts, with any drafter."""
