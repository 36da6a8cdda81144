"""Hash maps of C++ libraries as peers: the same arrays, the same batch, one call."""

from __future__ import annotations

import ctypes

import numpy as np

from .native import NotBuilt, address, build

__all__ = ["MAPS", "CppMap", "cpp_map"]

# name: compiler option, header, Debian package, pkg-config module
MAPS = {
    "boost::unordered_flat_map": ("-DMAP_BOOST", "boost/unordered/unordered_flat_map.hpp", "libboost1.81-dev", ""),
    "tsl::robin_map": ("-DMAP_ROBIN", "tsl/robin_map.h", "robin-map-dev", ""),
    "absl::flat_hash_map": ("-DMAP_ABSL", "absl/container/flat_hash_map.h", "libabsl-dev", "absl_flat_hash_map"),
}


class CppMap:
    """int64 -> int64 map. Raises `NotBuilt` where its headers are missing."""

    def __init__(self, name: str, *, huge_pages: bool = False) -> None:
        option, header, package, module = MAPS[name]
        options = ("-O3", "-march=native", "-std=c++17", option, *(["-DHUGE_PAGES"] if huge_pages else []))
        self._library = build("maps.cpp", options, header=header, package=package, module=module)
        self._library.map_new.restype = ctypes.c_void_p
        self._library.map_size.restype = ctypes.c_int64
        self._map = ctypes.c_void_p(self._library.map_new())
        self.name = name + (" (huge pages)" if huge_pages else "")

    def __len__(self) -> int:
        return int(self._library.map_size(self._map))

    def insert(self, keys: np.ndarray) -> None:
        """The k-th new key gets the value len + k."""
        self._library.map_insert(self._map, address(keys), ctypes.c_int64(len(keys)))

    def find(self, keys: np.ndarray, out: np.ndarray, threads: int = 1) -> np.ndarray:
        """Values, -1 where absent."""
        self._library.map_find(
            self._map, address(keys), ctypes.c_int64(len(keys)), address(out), ctypes.c_int64(threads)
        )
        return out

    def lookup(self, keys: np.ndarray, rows: np.ndarray, out: np.ndarray, threads: int = 1) -> np.ndarray:
        """Rows of the keys' values: find + memcpy. Every key must be present."""
        n, dim = ctypes.c_int64(len(keys)), ctypes.c_int64(rows.shape[1])
        self._library.map_lookup(self._map, address(keys), n, address(rows), dim, address(out), ctypes.c_int64(threads))
        return out

    def close(self) -> None:
        """Free the map."""
        if self._map:
            self._library.map_delete(self._map)
            self._map = ctypes.c_void_p()

    def __del__(self) -> None:
        if getattr(self, "_map", None):
            self.close()


def cpp_map(name: str, *, huge_pages: bool = False) -> CppMap | str:
    """The map, or why there is none."""
    try:
        return CppMap(name, huge_pages=huge_pages)
    except NotBuilt as error:
        return str(error)
