"""Environments: what answers the model between its messages in a conversation, and says what they are worth."""
