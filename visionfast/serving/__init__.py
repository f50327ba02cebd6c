"""An engine behind the real Triton Inference Server: what is written, who runs it, and who asks it.

`wire` says what goes over the network, `ensemble` which models a pipeline has, `pbtxt` and `repository` write them,
`stages` is what the server runs, `server` starts it, and `client` asks it.
"""
