//! Pictures and sentences made into the tensors that models take: decoded, resized, cropped, normalised and laid out, or tokenised, padded and masked.
//!
//! A model is written with the [`Step`]s that lead to its inputs; [`Pipeline::new`] checks them against these inputs, [`Pipeline::look`] says by the
//! headers alone what a request's items will take, and [`Pipeline::run`] does it. Decoders, filters and tokenisers are other people's crates. What is
//! ours is what is checked before they see a byte: the size that a picture's header claims decides no allocation before it is held to a limit.
//!
//! Semantics are those of Pillow, torchvision and Hugging Face's tokenizers, from which models come: filters that widen when they shrink
//! (`antialias`), sizes that are cut to whole pixels as there, crops about the centre. Exif orientation is passed over, as `Image.open` does,
//! transparency left out, and 16 bits are cut to 8.

mod decode;
mod picture_header;
mod picture_steps;
mod pipeline;
mod recipe;
mod step;
mod text_steps;

pub use decode::{Picture, decode};
pub use picture_header::{PictureFormat, PictureHeader};
pub use pipeline::{Media, Pipeline, PreprocessError, Work};
pub use recipe::{MAX_FILE_BYTES, Recipe};
pub use step::{Color, Filter, Order, Size, Step, read_steps};
pub use text_steps::MAX_TEXT_BYTES;
