"""The body for layers whose tokens see a window, and compressed entries behind it: DeepSeek-V4's."""
