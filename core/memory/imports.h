// Replaces functions that a loaded library imports, for the calls of that library only.
//
// A shared library calls what others define through entries of its global offset table, one address each, which the
// dynamic linker fills in. Writing another address there redirects every later call: one aligned store, so a thread in
// the middle of a call sees the old function or the new one. Entries that the linker has made read-only (RELRO) are
// made writable for the store and read-only again.
#pragma once

#include <vector>

#include "base/status.h"

namespace unisono {

struct Import {
  const char* name;          // of the function
  void* replacement;         // what its calls go to from now on
  void* original = nullptr;  // where they went before; set by replace_imports, before the first entry is changed
};

// In the library whose file name begins with `library` ("libc10.so"): all of `imports`, in their order, or none and
// `failure` says why.
bool replace_imports(const char* library, std::vector<Import*> imports, Failure& failure);

}  // namespace unisono
