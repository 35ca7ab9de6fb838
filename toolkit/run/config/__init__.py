"""Settings of a run: frozen pydantic models with a field per recipe flag."""
