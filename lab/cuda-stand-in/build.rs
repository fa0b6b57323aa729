//! Gives the library the name under which programs ask for the driver: once it is loaded by its path, `dlopen("libcuda.so.1")`
//! finds it by this name.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
