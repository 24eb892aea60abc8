"""Small programs that try the hardware for real, for `deploy doctor --probe`.

Each prints one JSON object a line and ends with a status that says what happened (bounded.py). They need torch and,
for transfers, NIXL; nothing of SGLang.
"""
