"""Everything that is drawn. matplotlib is imported when a picture is made."""
