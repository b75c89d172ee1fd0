"""Prompts and chats to token ids, and token ids to text."""
