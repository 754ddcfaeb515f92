"""OpenAI's Responses: `POST /v1/responses`."""
