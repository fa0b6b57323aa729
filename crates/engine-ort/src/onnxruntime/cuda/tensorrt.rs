//! The options of onnxruntime's TensorRT provider. With these options TensorRT builds its engines
//! when a session is made, and not in the first run of each shape. The engines are kept between
//! starts.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use downbeat_engine::ShapeRange;
use downbeat_engine::process::scratch;

/// The library's words if a part of the model needs shapes that were not given.
const WITHOUT_PROFILE: &str = "associated shape profiles";

/// Whether a session failed because TensorRT knew only the shapes of the model's inputs. If other
/// parts of the model run elsewhere, their outputs need shapes, too.
pub(super) fn wants_other_shapes(reason: &str) -> bool {
    reason.contains(WITHOUT_PROFILE)
}

/// The provider's options. `given` is the model's own configuration, which wins. `folder` is the
/// place of kept engines. `shapes` are the known shapes of the model's inputs.
pub(super) fn options(
    given: &BTreeMap<String, String>,
    folder: Option<&Folder>,
    shapes: &[ShapeRange],
) -> BTreeMap<String, String> {
    // Streams of the provider's own would leave the partition of the lane.
    let mut options = BTreeMap::from([("trt_auxiliary_streams".to_owned(), "0".to_owned())]);
    let mut set = |key: &str, value: String| options.insert(key.to_owned(), value);
    if let Some(Folder { engines, timings }) = folder {
        set("trt_engine_cache_enable", "1".into());
        set("trt_engine_cache_path", engines.to_string_lossy().into_owned());
        set("trt_timing_cache_enable", "1".into());
        set("trt_timing_cache_path", timings.to_string_lossy().into_owned());
    }
    if !given.keys().any(|key| key.starts_with("trt_profile_"))
        && let Some([least, most]) = profile(shapes)
    {
        set("trt_profile_min_shapes", least);
        // Kernels are chosen for the largest batch, which bounds the throughput.
        set("trt_profile_opt_shapes", most.clone());
        set("trt_profile_max_shapes", most);
    }
    options.extend(given.iter().map(|(key, value)| (key.clone(), value.clone())));
    options
}

/// The smallest and the largest shapes of the inputs that vary, in the provider's format. `None` if
/// no input varies, or a bound is unknown.
fn profile(shapes: &[ShapeRange]) -> Option<[String; 2]> {
    let varying = shapes.iter().filter(|shape| !shape.is_fixed());
    let mut texts = [Vec::new(), Vec::new()];
    for ShapeRange { name, least, most } in varying {
        if name.contains([':', ',']) {
            // The provider would misread the name.
            return None;
        }
        let most = most.iter().copied().collect::<Option<Vec<usize>>>()?;
        for (texts, dims) in texts.iter_mut().zip([least, &most]) {
            let dims: Vec<String> = dims.iter().map(usize::to_string).collect();
            texts.push(format!("{name}:{}", dims.join("x")));
        }
    }
    (!texts[0].is_empty()).then(|| texts.map(|texts| texts.join(",")))
}

/// The folders for TensorRT's results, which are kept between starts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Folder {
    /// The engines of this model.
    engines: PathBuf,
    /// The measured times of kernels, for all models.
    timings: PathBuf,
}

impl Folder {
    /// The folder of the model of `files` in `cache`. No other user may write it, as its contents
    /// are executed. An engine holds weights, but the provider names it only by the shape of the
    /// graph. So the folder's name comes from all ingredients: the files, `options`, and `versions`
    /// of library and GPU.
    ///
    /// # Errors
    /// If a file cannot be read, or the folder cannot be made or is not this user's alone.
    pub(super) fn new(
        cache: &Path,
        files: impl IntoIterator<Item = PathBuf>,
        options: &BTreeMap<String, String>,
        versions: &str,
    ) -> io::Result<Folder> {
        let mut hasher = DefaultHasher::new();
        for file in files {
            hash(&file, &mut hasher)?;
        }
        for (key, value) in options {
            hasher.write(format!("{key}={value}\n").as_bytes());
        }
        let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.') { c } else { '_' };
        let versions: String = versions.chars().map(plain).collect();
        let timings = cache.join("tensorrt");
        let engines = timings.join(format!("{:016x}-{versions}", hasher.finish()));
        std::fs::create_dir_all(cache)?;
        scratch::private_folder(&timings)?;
        scratch::private_folder(&engines)?;
        Ok(Folder { engines, timings })
    }
}

fn hash(path: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    let mut file = std::fs::File::open(path)?;
    let mut chunk = vec![0u8; 1 << 20];
    let mut length = 0;
    loop {
        let read = file.read(&mut chunk)?;
        let Some(bytes) = chunk.get(..read).filter(|bytes| !bytes.is_empty()) else { break };
        hasher.write(bytes);
        length += read as u64;
    }
    hasher.write_u64(length);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn range(name: &str, least: &[usize], most: &[Option<usize>]) -> ShapeRange {
        ShapeRange { name: name.into(), least: least.into(), most: most.into() }
    }

    fn given(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn engines_are_built_for_all_shapes_that_a_model_is_served_with() {
        let shapes = [
            range("ids", &[1, 1], &[Some(8), Some(128)]),
            range("table", &[4, 2], &[Some(4), Some(2)]),
            range("image", &[1, 3, 640, 640], &[Some(8), Some(3), Some(640), Some(640)]),
        ];
        let options = options(&BTreeMap::new(), None, &shapes);
        assert_eq!(
            options,
            given(&[
                ("trt_auxiliary_streams", "0"),
                ("trt_profile_min_shapes", "ids:1x1,image:1x3x640x640"),
                ("trt_profile_opt_shapes", "ids:8x128,image:8x3x640x640"),
                ("trt_profile_max_shapes", "ids:8x128,image:8x3x640x640"),
            ])
        );
    }

    /// Either all inputs that vary have a profile, or none: the provider accepts nothing in
    /// between.
    #[test]
    fn without_bounds_there_are_no_profiles() {
        let has_profile = |shapes: &[ShapeRange]| {
            options(&BTreeMap::new(), None, shapes).keys().any(|key| key.starts_with("trt_profile"))
        };
        let bounded = range("image", &[1, 3], &[Some(8), Some(3)]);
        assert!(has_profile(std::slice::from_ref(&bounded)));
        assert!(!has_profile(&[bounded.clone(), range("ids", &[1, 1], &[Some(8), None])]));
        assert!(!has_profile(&[range("fixed", &[1, 3], &[Some(1), Some(3)])]), "needs none");
        for name in ["x:0", "a,b"] {
            assert!(!has_profile(&[range(name, &[1], &[Some(8)])]), "the provider would read another name");
        }
    }

    #[test]
    fn what_a_model_says_itself_wins() {
        let own =
            given(&[("trt_fp16_enable", "1"), ("trt_profile_max_shapes", "ids:4x64"), ("trt_auxiliary_streams", "2")]);
        let options = options(&own, None, &[range("ids", &[1, 1], &[Some(8), Some(128)])]);
        assert_eq!(options, own, "its profile is not mixed with another one");
    }

    /// The provider names an engine by the graph alone, and would find it again for other weights.
    #[test]
    fn engines_are_kept_by_all_that_they_are_made_of_and_privately() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let [model, weights] = ["model.onnx", "weights"].map(|name| folder.path().join(name));
        std::fs::write(&model, "a graph").unwrap();
        std::fs::write(&weights, "1").unwrap();
        let place = |own: &[(&str, &str)], versions: &str| {
            Folder::new(&cache, [model.clone(), weights.clone()], &given(own), versions).unwrap()
        };
        let first = place(&[], "1.31.1 NVIDIA H200/x");
        assert_eq!(first, place(&[], "1.31.1 NVIDIA H200/x"));
        let options = options(&BTreeMap::new(), Some(&first), &[]);
        assert_eq!(options["trt_engine_cache_path"], first.engines.to_str().unwrap());
        assert_eq!((&*options["trt_engine_cache_enable"], &*options["trt_timing_cache_enable"]), ("1", "1"));
        assert!(first.engines.starts_with(cache.join("tensorrt")) && first.engines.is_dir());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&first.timings), mode(&first.engines)), (0o700, 0o700));
        assert_ne!(first, place(&[("trt_fp16_enable", "1")], "1.31.1 NVIDIA H200/x"));
        assert_ne!(first, place(&[], "1.31.2 NVIDIA H200/x"));
        std::fs::write(&weights, "2").unwrap();
        assert_ne!(first, place(&[], "1.31.1 NVIDIA H200/x"), "other weights");
        std::fs::set_permissions(&first.timings, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Folder::new(&cache, [model.clone()], &BTreeMap::new(), "").is_err(), "others can put engines there");
    }

    #[test]
    fn parts_that_run_elsewhere_are_told_from_other_failures() {
        let said = "User needs to provide all the dynamic shape inputs with associated profiles if they want to explicitly set profiles through provider options.\n\
             Following input(s) has no associated shape profiles provided: h";
        assert!(wants_other_shapes(said));
        assert!(!wants_other_shapes("TensorRT EP failed to create engine from network"));
    }
}
