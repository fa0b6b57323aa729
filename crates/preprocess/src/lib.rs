//! Turns pictures and sentences into the tensors that models take. Pictures are decoded, resized,
//! cropped, normalised and laid out; texts are tokenised, padded and masked.
//!
//! The user writes down a model's [`Step`]s, which lead from a picture or text to the model's
//! inputs. [`Pipeline::new`] checks the steps against these inputs. [`Pipeline::look`] reads only
//! the headers of a request's items and returns the time and memory that they need.
//! [`Pipeline::run`] makes the tensors. Decoders, filters and tokenisers are other people's crates.
//! The checks before them are ours: a picture's claimed size decides an allocation only after a
//! check against a limit.
//!
//! Models are trained with Pillow, torchvision and Hugging Face's tokenizers, so the semantics are
//! theirs. When a picture shrinks, a filter covers more of its pixels (`antialias`). Sizes are
//! rounded down to whole pixels, and crops are about the centre. Exif orientation is ignored, as
//! `Image.open` does, transparency is left out, and 16 bits are cut to 8.

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
