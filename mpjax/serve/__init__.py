"""A server of OpenAI's protocol over an engine (`pip install starlette uvicorn`)."""
