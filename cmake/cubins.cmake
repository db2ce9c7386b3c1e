# Runs the builder from the source tree, where the package is not importable by its name yet:
# a folder of links in the build tree gives it the layout that it will have when installed.
set(import_root "${CMAKE_CURRENT_BINARY_DIR}/import_root")
set(package_dir "${import_root}/ringfp4")
file(MAKE_DIRECTORY "${package_dir}")
foreach(folder IN ITEMS dsl build_cubins)
  file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}/${folder}" "${package_dir}/${folder}" SYMBOLIC)
endforeach()
file(GLOB modules CONFIGURE_DEPENDS package/*.py)
foreach(module IN LISTS modules)
  get_filename_component(file_name "${module}" NAME)
  file(CREATE_LINK "${module}" "${package_dir}/${file_name}" SYMBOLIC)
endforeach()

file(GLOB_RECURSE sources CONFIGURE_DEPENDS dsl/*.py build_cubins/*.py)
# pip's isolated build environment is itself reached through PYTHONPATH.
set(python_path "${import_root}:$ENV{PYTHONPATH}")
# GPUs that machines of this processor have. A Hopper beside an ARM processor builds its own.
set(archs sm_121a sm_120f)
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  list(APPEND archs sm_90a)
endif()
set(cubins_dir "${CMAKE_CURRENT_BINARY_DIR}/cubins")
add_custom_command(
  OUTPUT "${cubins_dir}/manifest.json"
  COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${python_path}"
          "${Python_EXECUTABLE}" -m ringfp4.build_cubins
          --shapes "${CMAKE_CURRENT_SOURCE_DIR}/shapes/h3.toml" --arch ${archs} --out "${cubins_dir}"
  DEPENDS ${sources} ${modules} shapes/h3.toml
  COMMENT "Compiling the kernels of shapes/h3.toml"
  USES_TERMINAL VERBATIM)
add_custom_target(cubins ALL DEPENDS "${cubins_dir}/manifest.json")
install(DIRECTORY "${cubins_dir}/" DESTINATION ringfp4/runtime/cubins
        FILES_MATCHING PATTERN "*.cubin" PATTERN "manifest.json")
