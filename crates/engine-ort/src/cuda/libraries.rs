//! NVIDIA's libraries that onnxruntime's providers need: the search for them, and loading them
//! early.
//!
//! The provider opens them by name, without a folder, and the loader knows few of their folders.
//! Once they are loaded by path, the loader finds them by name.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};

use super::options::Provider;
use super::unavailable::CudaUnavailable;
use crate::loader::loader_words;
use crate::{elf, python};

/// Files that belong together, and are used only if all of them are found.
#[derive(Debug)]
pub(crate) struct Component {
    /// The component's name for people.
    pub(crate) name: &'static str,
    /// The component's files, each after the files that it needs.
    pub(crate) files: &'static [&'static str],
    /// The remedy if the component is missing.
    advice: &'static str,
}

const INSTALL: &str = "Run `downbeat engine install --cuda`, or add its folder to LD_LIBRARY_PATH";
const INSTALL_TENSORRT: &str =
    "Install TensorRT 10 for CUDA 13 (pip install tensorrt-cu13), or add its folder to LD_LIBRARY_PATH";

/// The components that the CUDA provider needs, each after its own requirements. The provider opens
/// cuFFT and cuDNN only for a model with an operator for them. Missing ones should be reported at
/// the start.
pub(crate) const CUDA: [Component; 6] = [
    Component { name: "the CUDA runtime", files: &["libcudart.so.13"], advice: INSTALL },
    Component { name: "NVRTC", files: &["libnvrtc.so.13"], advice: INSTALL },
    Component { name: "cuBLAS", files: &["libcublasLt.so.13", "libcublas.so.13"], advice: INSTALL },
    Component { name: "cuRAND", files: &["libcurand.so.10"], advice: INSTALL },
    Component { name: "cuFFT", files: &["libcufft.so.12"], advice: INSTALL },
    Component {
        name: "cuDNN 9",
        // The first opens the others by name, from its own folder.
        files: &[
            "libcudnn.so.9",
            "libcudnn_graph.so.9",
            "libcudnn_ops.so.9",
            "libcudnn_cnn.so.9",
            "libcudnn_adv.so.9",
            "libcudnn_heuristic.so.9",
            "libcudnn_engines_precompiled.so.9",
            "libcudnn_engines_runtime_compiled.so.9",
        ],
        advice: INSTALL,
    },
];

/// The component that the TensorRT provider needs in addition.
const TENSORRT: Component =
    Component { name: "TensorRT 10", files: &["libnvinfer.so.10", "libnvonnxparser.so.10"], advice: INSTALL_TENSORRT };

/// The places to search for libraries, in order. Python is asked only if the other places lack the
/// library.
pub(crate) struct Places {
    folders: Vec<(&'static str, Vec<PathBuf>)>,
    python: Option<OnceCell<PythonPackages>>,
}

/// The folders of Python's packages that hold libraries.
#[derive(Default)]
struct PythonPackages {
    onnxruntime: Vec<PathBuf>,
    nvidia: Vec<PathBuf>,
}

impl Places {
    /// An empty list of places, with Python's packages if `python`.
    pub(crate) fn new(python: bool) -> Places {
        Places { folders: Vec::new(), python: python.then(OnceCell::new) }
    }

    /// Adds a place. `name` describes it to people.
    pub(crate) fn add(&mut self, name: &'static str, folders: Vec<PathBuf>) {
        if !folders.is_empty() {
            self.folders.push((name, folders));
        }
    }

    /// Adds NVIDIA's packages in folders of Python packages.
    pub(crate) fn add_packages(&mut self, name: &'static str, packages: &[PathBuf]) {
        let nvidia = packages.iter().flat_map(|folder| in_nvidia(&folder.join("nvidia")));
        let tensorrt = packages.iter().map(|folder| folder.join("tensorrt_libs")).filter(|folder| folder.is_dir());
        self.add(name, nvidia.chain(tensorrt).collect());
    }

    /// Adds the known folders of the loader: `LD_LIBRARY_PATH`.
    pub(crate) fn add_loader_path(&mut self) {
        let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let folders = std::env::split_paths(&path).filter(|p| !p.as_os_str().is_empty()).collect();
        self.add("in LD_LIBRARY_PATH", folders);
    }

    /// Adds the folders where CUDA and distributions put libraries.
    pub(crate) fn add_system(&mut self) {
        // The newest CUDA first, but before it /usr/local/cuda, which the administrator chose.
        let mut cuda = children(Path::new("/usr/local"), |name| name.starts_with("cuda-13"));
        cuda.reverse();
        cuda.insert(0, "/usr/local/cuda".into());
        let mut folders: Vec<PathBuf> = cuda.into_iter().map(|folder| folder.join("lib64")).collect();
        folders.extend(configured());
        let architecture = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        folders.extend([&architecture, "/usr/lib64", "/usr/lib", "/usr/local/lib"].map(PathBuf::from));
        folders.retain(|folder| folder.is_dir());
        self.add("in /usr/local/cuda and the system's library folders", folders);
    }

    /// The folders that may hold an onnxruntime library.
    pub(crate) fn for_onnxruntime(&self) -> impl Iterator<Item = &PathBuf> {
        let python = std::iter::once_with(|| self.python_packages().map(|p| &p.onnxruntime)).flatten().flatten();
        self.folders.iter().flat_map(|(_, folders)| folders).chain(python)
    }

    fn for_nvidia(&self) -> impl Iterator<Item = &PathBuf> {
        let python = std::iter::once_with(|| self.python_packages().map(|p| &p.nvidia)).flatten().flatten();
        self.folders.iter().flat_map(|(_, folders)| folders).chain(python)
    }

    fn python_packages(&self) -> Option<&PythonPackages> {
        self.python.as_ref().map(|cell| cell.get_or_init(PythonPackages::ask))
    }

    /// The places in words.
    pub(crate) fn words(&self) -> String {
        let python = self.python.as_ref().map(|_| "in the packages of python3");
        let names: Vec<&str> = self.folders.iter().map(|(name, _)| *name).chain(python).collect();
        if names.is_empty() { "nowhere".to_owned() } else { names.join(", ") }
    }

    /// The paths of a component's files, in the first folder that has all of them.
    fn find(&self, component: &Component) -> Result<Vec<PathBuf>, CudaUnavailable> {
        let Component { name, files, advice } = *component;
        let mut incomplete = None;
        for folder in self.for_nvidia() {
            let missing: Vec<&'static str> =
                files.iter().copied().filter(|file| !folder.join(file).is_file()).collect();
            match missing.first() {
                None => return Ok(files.iter().map(|file| folder.join(file)).collect()),
                Some(file) if missing.len() < files.len() => {
                    let what = format!("{name} in {} is not whole: there is no {file}", folder.display());
                    incomplete.get_or_insert(CudaUnavailable::new(what, advice));
                }
                Some(_) => {}
            }
        }
        let file = files.first().copied().unwrap_or(name);
        Err(incomplete.unwrap_or_else(|| {
            let what = format!("{name} is missing: no {file} found (looked {})", self.words());
            CudaUnavailable::new(what, advice)
        }))
    }

    /// All libraries that `provider` needs, in loading order.
    pub(crate) fn libraries(&self, provider: Provider) -> Result<Vec<FoundLibrary>, CudaUnavailable> {
        let tensorrt = (provider == Provider::Tensorrt).then_some(&TENSORRT);
        let mut found = Vec::new();
        for component in CUDA.iter().chain(tensorrt) {
            let paths = self.find(component)?.into_iter();
            found.extend(paths.map(|path| FoundLibrary { component: component.name, path, advice: component.advice }));
        }
        found.iter().try_for_each(FoundLibrary::check)?;
        Ok(found)
    }
}

/// A library of NVIDIA's that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// The component of the library, such as `cuDNN 9`.
    pub component: &'static str,
    /// The file.
    pub path: PathBuf,
    advice: &'static str,
}

impl FoundLibrary {
    /// Checks that the file is whole.
    fn check(&self) -> Result<(), CudaUnavailable> {
        elf::check_whole(&self.path).map_err(|reason| self.broken(&format!("{}: {reason}", self.path.display())))
    }

    fn broken(&self, reason: &str) -> CudaUnavailable {
        CudaUnavailable::new(format!("{} does not load: {reason}", self.component), self.advice)
    }

    /// Loads the library for good, so that a later open by name gets this one.
    pub(crate) fn load(&self) -> Result<(), CudaUnavailable> {
        // SAFETY: runs the initialisers of a library that the user of this process installed.
        let library = unsafe { Library::open(Some(&self.path), RTLD_LAZY | RTLD_GLOBAL) };
        std::mem::forget(library.map_err(|e| self.broken(&loader_words(&e)))?);
        Ok(())
    }
}

impl PythonPackages {
    /// Asks the `python3` on the path for the folders of its packages, without importing them.
    fn ask() -> PythonPackages {
        const ASK: &str = "
import importlib.util as u
for name in ('onnxruntime', 'nvidia', 'tensorrt_libs'):
    try: found = u.find_spec(name)
    except (ImportError, ValueError): found = None
    for place in (found and found.submodule_search_locations) or (): print(name, place, sep='\\t')
";
        let mut packages = PythonPackages::default();
        let output = python::command(python::NAME.as_ref(), ASK).and_then(|mut ask| ask.output());
        let output = output.ok().filter(|output| output.status.success());
        for line in String::from_utf8_lossy(&output.map(|o| o.stdout).unwrap_or_default()).lines() {
            match line.split_once('\t') {
                Some(("onnxruntime", folder)) => packages.onnxruntime.push(Path::new(folder).join("capi")),
                Some(("nvidia", folder)) => packages.nvidia.extend(in_nvidia(Path::new(folder))),
                Some((_, folder)) => packages.nvidia.push(folder.into()),
                None => {}
            }
        }
        packages
    }
}

/// The folders with libraries in the package `nvidia`: nvidia/cu13/lib, nvidia/cudnn/lib. The
/// packages of CUDA 12 have a folder for each library.
fn in_nvidia(package: &Path) -> Vec<PathBuf> {
    children(package, |_| true).into_iter().map(|folder| folder.join("lib")).collect()
}

/// Folders in a folder, by name.
fn children(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    let named = entries.filter(|path| path.file_name().and_then(|n| n.to_str()).is_some_and(&wanted));
    named.filter(|path| path.is_dir()).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The folders in the configuration of the system's loader.
fn configured() -> Vec<PathBuf> {
    let files = std::fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().filter_map(Result::ok).map(|e| e.path());
    let files: BTreeSet<PathBuf> = files.filter(|path| path.extension().is_some_and(|e| e == "conf")).collect();
    let files = std::iter::once(PathBuf::from("/etc/ld.so.conf")).chain(files);
    let lines = files.filter_map(|file| std::fs::read_to_string(file).ok());
    lines
        .flat_map(|text| text.lines().map(str::trim).map(PathBuf::from).collect::<Vec<_>>())
        .filter(|p| p.is_absolute())
        .collect()
}
