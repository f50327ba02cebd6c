"""What a served model takes and gives, in arrays: the one definition, for the client, the stages and config.pbtxt.

`B` requests' images that the server put together, `K` objects or masks of the fullest image, at least one row. Only
numbers go over the wire: NVIDIA's Python stub for this server (pytriton 0.7.0) was built for NumPy 1, handles byte
strings of NumPy 2 wrongly, and refuses empty arrays.

An image goes as it is encoded, with zeros behind it up to a multiple of `BUCKET`, so that images of about one size have
one shape, which is what the server puts together. Options of a request (`conf`, `iou`, …) go as a tensor of their own,
not as the request's parameters: the server's cache (Triton 2.51) looks at tensors alone, and would give one request the
answer for another one's options. For the same reason an answer's optional tensors depend on the options, not on which
outputs the request names. A fault of a whole request comes back as the text of the server's error.

    tensors      names, dtypes and dims, by task
    requests     an image and its options              prompts      clicks, boxes and masks to go on from
    objects      detect, segment                       masks        prompt-segment
    vectors      embed                                 faults       what is wrong, with an image or with a request
"""

from visionfast.serving.wire.faults import fault_of, fault_text, pack_problems, unpack_problem
from visionfast.serving.wire.objects import pack_answers, unpack_answers
from visionfast.serving.wire.requests import BUCKET, pack_image, pack_options, unpack_image, unpack_options
from visionfast.serving.wire.tensors import OPTIONS, STAGES, WireTensor, inputs_of, options_of, outputs_of, stages_of

__all__ = [
    "BUCKET",
    "OPTIONS",
    "STAGES",
    "WireTensor",
    "fault_of",
    "fault_text",
    "inputs_of",
    "options_of",
    "outputs_of",
    "pack_answers",
    "pack_image",
    "pack_options",
    "pack_problems",
    "stages_of",
    "unpack_answers",
    "unpack_image",
    "unpack_options",
    "unpack_problem",
]
