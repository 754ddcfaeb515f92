"""The model server behind memd: its client, its probes, llama.cpp as a child process."""
