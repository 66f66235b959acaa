// See sites.h.
#define Py_BUILD_CORE  // the frames of Python 3.11; later versions are built for the stable interface, without them
#include <Python.h>
#if !defined(Py_LIMITED_API) && PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030c0000
#include <internal/pycore_frame.h>
#define UNISONO_FRAMES
#endif
#undef Py_BUILD_CORE

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "memory/activity.h"
#include "python/sites.h"

namespace unisono {
namespace {

constexpr size_t kPlaces = 4096;  // of the table, a power of two
constexpr size_t kMostSites = kPlaces / 2;
constexpr int kMostFrames = 64;  // looked at for one call

struct Site {
  PyObject* code = nullptr;  // held, so that no other can have its address
  int instruction = 0;
  const char* text = nullptr;  // null: a library's
};

std::vector<std::string>& folders = *new std::vector<std::string>;
Site sites[kPlaces];  // guarded by the GIL
size_t used = 0;

bool is_library(const std::string& file) {
  if (file.rfind("<frozen", 0) == 0 || file.rfind("<eval_with_key>", 0) == 0) return true;
  if (file.size() >= 8 && file.compare(file.size() - 8, 8, "/demo.py") == 0) return false;  // shows what users write
  return std::any_of(folders.begin(), folders.end(), [&](const auto& f) { return file.rfind(f, 0) == 0; });
}

// The code object's file, without an exception; empty if it has none.
std::string file_of(PyObject* code) {
  PyObject* name = PyObject_GetAttrString(code, "co_filename");
  Py_ssize_t length = 0;
  const char* text = name ? PyUnicode_AsUTF8AndSize(name, &length) : nullptr;
  std::string file = text ? std::string(text, static_cast<size_t>(length)) : "";
  PyErr_Clear();
  Py_XDECREF(name);
  return file;
}

const char* make_text(const std::string& file, int line) {
  std::string words = file.substr(file.rfind('/') + 1) + ":" + std::to_string(line);
  if (words.size() >= kSiteBytes) {
    size_t cut = words.size() - kSiteBytes + 1;
    while (cut < words.size() && (words[cut] & 0xc0) == 0x80) cut++;  // not in the middle of a character
    words.erase(0, cut);
  }
  char* text = new char[kSiteBytes]();
  std::memcpy(text, words.data(), words.size());
  return text;
}

// Null: the table is full.
template <class LineOf>
const Site* find(PyObject* code, int instruction, LineOf line_of) {
  const uint64_t hash = (reinterpret_cast<uintptr_t>(code) >> 4) * 0x9e3779b97f4a7c15 +
                        static_cast<uint64_t>(instruction) * 0xff51afd7ed558ccd;
  size_t at = hash >> 52;
  static_assert(kPlaces == 1 << 12);
  while (sites[at].code) {
    if (sites[at].code == code && sites[at].instruction == instruction) return &sites[at];
    at = (at + 1) % kPlaces;
  }
  if (used >= kMostSites) return nullptr;
  const std::string file = file_of(code);
  Site site{Py_NewRef(code), instruction, is_library(file) ? nullptr : make_text(file, line_of())};
  if (sites[at].code) return nullptr;  // somebody's code ran meanwhile and took the place
  sites[at] = site;
  used++;
  return &sites[at];
}

}  // namespace

void set_library_folders(std::vector<std::string> named) {
  folders = std::move(named);
}

#ifdef UNISONO_FRAMES

const char* find_call_site() {
  const PyThreadState* thread = PyThreadState_Get();
  const _PyInterpreterFrame* frame = thread->cframe->current_frame;
  for (int i = 0; frame && i < kMostFrames; i++, frame = frame->previous) {
    PyCodeObject* code = frame->f_code;
    const int instruction = _PyInterpreterFrame_LASTI(frame);
    const Site* site = find(reinterpret_cast<PyObject*>(code), instruction, [&] {
      return PyCode_Addr2Line(code, instruction * static_cast<int>(sizeof(_Py_CODEUNIT)));
    });
    if (!site) return nullptr;
    if (site->text) return site->text;
  }
  return nullptr;
}

#else

const char* find_call_site() {
  auto* frame = reinterpret_cast<PyObject*>(PyEval_GetFrame());
  Py_XINCREF(frame);
  const char* text = nullptr;
  for (int i = 0; frame && frame != Py_None && i < kMostFrames && !text; i++) {
    auto* as_frame = reinterpret_cast<PyFrameObject*>(frame);
    auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(as_frame));
    const int line = PyFrame_GetLineNumber(as_frame);
    const Site* site = find(code, line, [&] { return line; });
    Py_DECREF(code);
    PyObject* back = site && !site->text ? PyObject_GetAttrString(frame, "f_back") : nullptr;
    if (site) text = site->text;
    PyErr_Clear();
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return text;
}

#endif

}  // namespace unisono
