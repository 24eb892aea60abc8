"""What the containers run around SGLang."""
