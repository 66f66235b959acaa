// The flight recorder as a file: what one process did, in JSON, for `unisono trace`.
//
// Written when a group fails, on a signal, or by a tool that reads another process's memory. None of them needs the GIL
// or any other lock of the process that is looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace unisono {

// Everything the recorder of the heap at `heap_base` says; `why` says what the file was written for. At most
// `most` operations, the last ones.
std::string record_as_json(const std::byte* heap_base, const std::string& why, size_t most = SIZE_MAX);
// The same of another process's heap, through a descriptor of its memory; empty: that is no heap of this version.
std::string record_of_file(int fd, const std::string& why, size_t most = SIZE_MAX);

// Where files go; empty: nowhere. Before groups are made.
void set_trace_folder(const std::string& folder);
bool has_trace_folder();
// Writes DIR/unisono-<host>-<pid>.json. A file of the same process is replaced, whole: any thread of any rank may
// write at any time, and readers see one of them.
void dump_record(const std::byte* heap_base, const std::string& why);
// From then on this process's own record is written whenever the signal comes. False: the system refused.
bool dump_on_signal(int number);

}  // namespace unisono
