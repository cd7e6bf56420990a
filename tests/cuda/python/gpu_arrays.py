"""Arrays on a GPU without a library of arrays: memory of the driver, by ctypes, that is handed over by DLPack. The driver
is the one that the loader finds, a stand-in (tools/ptxrun/libcuda) or a real one."""

import ctypes

import numpy as np

CUDA = 2  # of DLPack's devices


class DlDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int), ("ndim", ctypes.c_int),
        ("dtype", DlDataType), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class DlManagedTensor(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DlManagedTensor))
DlManagedTensor._fields_ = [("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_lent = {}  # by address: what was handed over and not given back


@Deleter
def _give_back(tensor):
    del _lent[ctypes.addressof(tensor.contents)]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Driver:
    """The functions that tests need; each raises unless it succeeds."""

    def __init__(self):
        self._library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} gave {result}")

    def allocate(self, size):
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        return address.value

    def free(self, address):
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address, array):
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))

    def download(self, array, address):
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))


class Memory:
    """A piece of the GPU's memory, freed with its last array."""

    def __init__(self, driver, size):
        self._driver, self.size, self.address = driver, size, driver.allocate(size)

    def __del__(self):
        self._driver.free(self.address)


class Namespace:
    """What __array_namespace__ of an array library gives."""

    uint8, float32, float16 = np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float16)

    def __init__(self, driver):
        self._driver = driver
        self.made = []  # shapes

    def empty(self, shape, dtype, device):
        assert device == "gpu 0"
        self.made.append(shape)
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        return GpuArray(self, Memory(self._driver, size), shape, None, dtype)

    def asarray(self, array):
        """As NumPy's array lies in memory, if nothing is between its elements."""
        base = array.base if array.base is not None and array.base.nbytes == array.nbytes else array
        memory = Memory(self._driver, base.nbytes)
        self._driver.upload(memory.address, np.ascontiguousarray(base))
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return GpuArray(self, memory, array.shape, strides, array.dtype)


class GpuArray:
    device = "gpu 0"

    def __init__(self, namespace, memory, shape, strides, dtype):
        self._namespace, self.memory, self.shape, self.strides, self.dtype = namespace, memory, shape, strides, dtype
        self.ordinal = 0  # where it says it is
        self.streams = []  # that it was asked for

    def __array_namespace__(self):
        return self._namespace

    def __dlpack_device__(self):
        return (CUDA, self.ordinal)

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        sides = (ctypes.c_int64 * len(self.shape))(*self.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * len(self.shape))(*self.strides)
        kind = DlDataType(CODES[self.dtype.kind], 8 * self.dtype.itemsize, 1)
        steps = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)) if strides is not None else None
        tensor = DlTensor(self.memory.address, CUDA, self.ordinal, len(self.shape), kind, sides, steps, 0)
        managed = DlManagedTensor(tensor, None, _give_back)
        _lent[ctypes.addressof(managed)] = (managed, sides, strides, self)
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)

    def numpy(self):
        """A copy on the host, of an array without strides of its own."""
        array = np.empty(self.shape, self.dtype)
        self._namespace._driver.download(array, self.memory.address)
        return array


def lent():
    """How many arrays were handed over and not given back."""
    return len(_lent)
