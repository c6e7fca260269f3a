# The native extension, built in place, and its C++ tests under the sanitizers.
PYTHON ?= .venv/bin/python
NATIVE_JOBS ?= 2
CMAKE = $(PYTHON) -m cmake

.PHONY: native native-test

native:
	$(CMAKE) -S . -B build/native -DCMAKE_BUILD_TYPE=Release -DLMCACHE_FAST_WERROR=ON \
		-DPython_EXECUTABLE=$$($(PYTHON) -c "import sys; print(sys.executable)") \
		-Dpybind11_DIR=$$($(PYTHON) -m pybind11 --cmakedir)
	$(CMAKE) --build build/native -j $(NATIVE_JOBS)
	$(CMAKE) --install build/native --prefix .

native-test:
	for sanitizer in address,undefined thread; do \
		$(CMAKE) -S . -B build/native-$$sanitizer -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLMCACHE_FAST_WERROR=ON \
			-DLMCACHE_FAST_BUILD_EXTENSION=OFF -DLMCACHE_FAST_BUILD_TESTS=ON \
			-DLMCACHE_FAST_SANITIZE=$$sanitizer && \
		$(CMAKE) --build build/native-$$sanitizer -j $(NATIVE_JOBS) && \
		$(CMAKE) -E chdir build/native-$$sanitizer ctest --output-on-failure || exit 1; \
	done
