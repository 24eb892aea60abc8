"""The kernel's boot parameters."""


def parse_kernel_command_line(text: str) -> dict[str, str]:
    """Parameters by name, the last of each; one without a value has an empty one. Quotes may hold spaces."""
    parameters: dict[str, str] = {}
    word, quoted = "", False
    for character in text[:65536] + " ":
        if character == '"':
            quoted = not quoted
        elif character.isspace() and not quoted:
            if word:
                name, _, value = word.partition("=")
                parameters[name] = value
            word = ""
        else:
            word += character
    return parameters
