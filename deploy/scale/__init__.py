"""What happens with ten, a hundred and a thousand hosts: how image and model get there, and what reaches its limit."""
