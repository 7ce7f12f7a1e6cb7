"""The planner: what each drafter would have to accept to pay here, and which one to train."""
