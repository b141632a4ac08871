// Defines a Python class that watches whether processes of a cluster answer.

#ifndef TF_LAYOUTMAP_PYTHON_ANSWER_WATCH_H_
#define TF_LAYOUTMAP_PYTHON_ANSWER_WATCH_H_

#include <pybind11/pybind11.h>

namespace layoutmap {

// Adds the class `AnswerWatch` to the module.
void DefineAnswerWatch(pybind11::module_* m);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_PYTHON_ANSWER_WATCH_H_
