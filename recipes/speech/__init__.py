"""Speech: spoken words as classes or characters, with Legendre memories or attention."""
