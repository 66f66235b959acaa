// Where in the program a call was made, cheap enough for every call: "train.py:88", of the innermost frame outside of
// unisono and torch.
//
// A rank that others wait for is in no call, so its last one must have noted where it came from; nobody can ask it
// later. The frames are walked without making frame objects where Python's version lets us, and what a code object's
// instruction is called is looked up once and kept, with the code object, in a table that is never emptied.
#pragma once

#include <string>
#include <vector>

namespace unisono {

// Whose code is not the program's: folders that file names begin with.
void set_library_folders(std::vector<std::string> folders);

// kSiteBytes of text that stay for ever; null: not known. With the GIL held.
const char* find_call_site();

}  // namespace unisono
