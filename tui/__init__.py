"""The Textual screens. No I/O but through a session."""
