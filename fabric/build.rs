//! Compiles the provider, which is C: libfabric's interface is structures and inline functions of its headers.

fn main() {
    let files =
        ["atomics", "domain", "endpoint", "info", "queues", "transfers"].map(|name| format!("src/{name}.c"));
    files.iter().chain([&"src/vnet.h".into()]).for_each(|file| println!("cargo::rerun-if-changed={file}"));
    cc::Build::new()
        .files(&files)
        .include("../interconnect/include")
        .std("gnu11")
        .warnings_into_errors(true)
        .flag("-Wno-missing-field-initializers")
        .compile("vnet_fi_c");
    println!("cargo::rustc-link-lib=fabric");
}
