"""Terminal chats and runs over prompts, with any drafter."""
