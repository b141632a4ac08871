// Defines a Python class for the open vocabularies of the core.

#ifndef TF_LAYOUTMAP_PYTHON_VOCABULARY_H_
#define TF_LAYOUTMAP_PYTHON_VOCABULARY_H_

#include <pybind11/pybind11.h>

namespace layoutmap {

// Adds the class `Vocabulary` and the function `first_values` to the module.
void DefineVocabulary(pybind11::module_* m);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_PYTHON_VOCABULARY_H_
