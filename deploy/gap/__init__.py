"""How far the limit is: a roofline of decode and prefill, and what a measurement lacks of it."""
