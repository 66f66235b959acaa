// See imports.h.
#include "memory/imports.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

namespace unisono {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kJumpSlot = R_X86_64_JUMP_SLOT, kGlobal = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr uint32_t kJumpSlot = R_AARCH64_JUMP_SLOT, kGlobal = R_AARCH64_GLOB_DAT;
#else
constexpr uint32_t kJumpSlot = ~0u, kGlobal = ~0u;  // no entry is ever found
#endif

struct Library {
  const char* name;
  std::string path;
  uintptr_t base = 0;
  uintptr_t begin = UINTPTR_MAX, end = 0;      // what is loaded of it
  uintptr_t sealed_begin = 0, sealed_end = 0;  // read-only since it was linked
  const Elf64_Dyn* dynamic = nullptr;

  bool holds(uintptr_t at) const { return begin <= at && at < end; }
};

bool is_named(const char* path, const char* name) {
  const char* slash = std::strrchr(path, '/');
  return std::strncmp(slash ? slash + 1 : path, name, std::strlen(name)) == 0;
}

int look_at(dl_phdr_info* info, size_t, void* data) {
  auto& found = *static_cast<Library*>(data);
  if (!info->dlpi_name || !is_named(info->dlpi_name, found.name)) return 0;
  found.path = info->dlpi_name;
  found.base = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& part = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + part.p_vaddr, end = begin + part.p_memsz;
    if (part.p_type == PT_LOAD) {
      found.begin = std::min(found.begin, begin);
      found.end = std::max(found.end, end);
    } else if (part.p_type == PT_DYNAMIC) {
      found.dynamic = reinterpret_cast<const Elf64_Dyn*>(begin);
    } else if (part.p_type == PT_GNU_RELRO) {
      found.sealed_begin = begin;
      found.sealed_end = end;
    }
  }
  return 1;
}

// The library's relocations by symbol, and the names of the symbols.
class Tables {
 public:
  explicit Tables(const Library& library) : library_(library) {
    for (const Elf64_Dyn* d = library.dynamic; d && d->d_tag != DT_NULL; d++) {
      switch (d->d_tag) {
        case DT_SYMTAB:
          symbols_ = at<Elf64_Sym>(d->d_un.d_ptr);
          break;
        case DT_STRTAB:
          strings_ = at<char>(d->d_un.d_ptr);
          break;
        case DT_JMPREL:
          calls_ = at<Elf64_Rela>(d->d_un.d_ptr);
          break;
        case DT_PLTRELSZ:
          call_count_ = d->d_un.d_val / sizeof(Elf64_Rela);
          break;
        case DT_RELA:
          others_ = at<Elf64_Rela>(d->d_un.d_ptr);
          break;
        case DT_RELASZ:
          other_count_ = d->d_un.d_val / sizeof(Elf64_Rela);
          break;
        default:
          break;
      }
    }
  }

  // Every place that holds the address of the function `name`: a call's, or one that is also used as a pointer.
  std::vector<uintptr_t> entries_of(const char* name) const {
    std::vector<uintptr_t> found;
    if (!symbols_ || !strings_) return found;
    collect(calls_, calls_ ? call_count_ : 0, name, found);
    collect(others_, others_ ? other_count_ : 0, name, found);
    return found;
  }

 private:
  // glibc has added the base to what stands in the dynamic section; other linkers leave it as it is in the file.
  template <class T>
  const T* at(uintptr_t address) const {
    return reinterpret_cast<const T*>(library_.holds(address) ? address : address + library_.base);
  }
  void collect(const Elf64_Rela* table, size_t count, const char* name, std::vector<uintptr_t>& found) const {
    for (size_t i = 0; i < count; i++) {
      const auto kind = static_cast<uint32_t>(ELF64_R_TYPE(table[i].r_info));
      if (kind != kJumpSlot && kind != kGlobal) continue;
      const Elf64_Sym& symbol = symbols_[ELF64_R_SYM(table[i].r_info)];
      if (std::strcmp(strings_ + symbol.st_name, name) == 0) found.push_back(library_.base + table[i].r_offset);
    }
  }
  const Library& library_;
  const Elf64_Sym* symbols_ = nullptr;
  const char* strings_ = nullptr;
  const Elf64_Rela *calls_ = nullptr, *others_ = nullptr;
  size_t call_count_ = 0, other_count_ = 0;
};

bool write_entry(const Library& library, uintptr_t entry, void* value) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  // The linker seals whole pages: one that RELRO ends in the middle of stays writable.
  const bool sealed = library.sealed_begin / page * page <= entry && entry < library.sealed_end / page * page;
  auto* first = reinterpret_cast<void*>(entry / page * page);
  if (sealed && mprotect(first, page, PROT_READ | PROT_WRITE) != 0) return false;
  // Its partner is the library's own call through the entry, in any thread: a load that the jump depends on. Release,
  // so that a thread which gets into the replacement finds Import::original there, stored before.
  std::atomic_ref(*reinterpret_cast<void**>(entry)).store(value, std::memory_order_release);
  if (sealed) mprotect(first, page, PROT_READ);
  return true;
}

// Where the calls go now. An entry that has not been used may still point into the library itself, to the stub that
// looks the function up.
void* target_of(const Library& library, const std::vector<uintptr_t>& entries, const char* name) {
  for (uintptr_t entry : entries) {
    void* target = *reinterpret_cast<void**>(entry);
    if (target && !library.holds(reinterpret_cast<uintptr_t>(target))) return target;
  }
  return dlsym(RTLD_DEFAULT, name);
}

}  // namespace

bool replace_imports(const char* name, std::vector<Import*> imports, Failure& failure) {
  Library library{.name = name, .path = {}};
  auto refuse = [&](const std::string& why) { return fail(failure, Code::system, std::string(name) + why), false; };
  if (!dl_iterate_phdr(look_at, &library)) return refuse(" is not loaded in this process");
  const Tables tables(library);
  std::vector<std::vector<uintptr_t>> entries;
  for (Import* import : imports) {
    entries.push_back(tables.entries_of(import->name));
    if (entries.back().empty()) return refuse(" imports no " + std::string(import->name) + " (" + library.path + ")");
    import->original = target_of(library, entries.back(), import->name);
    if (!import->original) return refuse(": where its " + std::string(import->name) + " is was not found");
  }
  for (size_t i = 0; i < imports.size(); i++)
    for (uintptr_t entry : entries[i]) {
      if (write_entry(library, entry, imports[i]->replacement)) continue;
      const std::string reason = std::strerror(errno);
      for (size_t j = 0; j <= i; j++)
        for (uintptr_t done : entries[j]) write_entry(library, done, imports[j]->original);
      return refuse(": its table of imports cannot be written: " + reason);
    }
  return true;
}

}  // namespace unisono
