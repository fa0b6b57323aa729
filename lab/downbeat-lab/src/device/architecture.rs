//! The networks of the papers as lists of operators, from their architectures.

use std::fmt;
use std::str::FromStr;

use super::failure::{DeviceFailure, named};
use super::operator::Operator;
use super::{bert, convolutional};

/// A network of the papers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Architecture {
    /// 3x224x224.
    ResNet50,
    /// 3x224x224.
    ResNet101,
    /// 3x224x224.
    ResNet152,
    /// 3x224x224.
    Vgg16,
    /// 3x224x224.
    Vgg19,
    /// 3x224x224, of one tower.
    AlexNet,
    /// 3x224x224, of full width.
    MobileNet,
    /// 3x299x299.
    InceptionV3,
    /// 3x299x299.
    InceptionV4,
    /// 3x128x128, 64 channels at the top.
    UNet,
    /// 3x224x224, ResNet18 as encoder.
    LinkNet,
    /// 12 layers, 768 wide.
    BertBase,
    /// 24 layers, 1024 wide.
    BertLarge,
}

impl Architecture {
    /// All architectures.
    pub const ALL: [Architecture; 13] = [
        Architecture::ResNet50,
        Architecture::ResNet101,
        Architecture::ResNet152,
        Architecture::Vgg16,
        Architecture::Vgg19,
        Architecture::AlexNet,
        Architecture::MobileNet,
        Architecture::InceptionV3,
        Architecture::InceptionV4,
        Architecture::UNet,
        Architecture::LinkNet,
        Architecture::BertBase,
        Architecture::BertLarge,
    ];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::ResNet50 => "resnet50",
            Architecture::ResNet101 => "resnet101",
            Architecture::ResNet152 => "resnet152",
            Architecture::Vgg16 => "vgg16",
            Architecture::Vgg19 => "vgg19",
            Architecture::AlexNet => "alexnet",
            Architecture::MobileNet => "mobilenet",
            Architecture::InceptionV3 => "inceptionv3",
            Architecture::InceptionV4 => "inceptionv4",
            Architecture::UNet => "unet",
            Architecture::LinkNet => "linknet",
            Architecture::BertBase => "bertbase",
            Architecture::BertLarge => "bertlarge",
        }
    }

    /// Returns whether requests for this network have a length.
    pub fn has_length(self) -> bool {
        matches!(self, Architecture::BertBase | Architecture::BertLarge)
    }

    /// Returns the operators for one item of `length`; only some networks have a length. With
    /// `fused`, a convolution includes the pointwise operators after it. The number of operators
    /// does not depend on the length.
    pub fn operators(self, fused: bool, length: u32) -> Vec<Operator> {
        match self {
            Architecture::ResNet50 => convolutional::resnet([3, 4, 6, 3], fused),
            Architecture::ResNet101 => convolutional::resnet([3, 4, 23, 3], fused),
            Architecture::ResNet152 => convolutional::resnet([3, 8, 36, 3], fused),
            Architecture::Vgg16 => convolutional::vgg([2, 2, 3, 3, 3], fused),
            Architecture::Vgg19 => convolutional::vgg([2, 2, 4, 4, 4], fused),
            Architecture::AlexNet => convolutional::alexnet(fused),
            Architecture::MobileNet => convolutional::mobilenet(fused),
            Architecture::InceptionV3 => convolutional::inception_v3(fused),
            Architecture::InceptionV4 => convolutional::inception_v4(fused),
            Architecture::UNet => convolutional::unet(128, fused),
            Architecture::LinkNet => convolutional::linknet(224, fused),
            Architecture::BertBase => bert::bert(12, 768, u64::from(length.max(1)), fused),
            Architecture::BertLarge => bert::bert(24, 1024, u64::from(length.max(1)), fused),
        }
    }

    /// Returns the bytes of an item's input and output.
    pub fn item_bytes(self, length: u32) -> (u64, u64) {
        match self {
            Architecture::InceptionV3 | Architecture::InceptionV4 => (3 * 299 * 299 * 4, 4_000),
            Architecture::UNet => (3 * 128 * 128 * 4, 2 * 128 * 128 * 4),
            Architecture::LinkNet => (3 * 224 * 224 * 4, 2 * 224 * 224 * 4),
            // Input: token ids, a mask and token types. Output: a class.
            Architecture::BertBase | Architecture::BertLarge => (12 * u64::from(length.max(1)), 8),
            _ => (3 * 224 * 224 * 4, 4_000),
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Architecture {
    type Err = DeviceFailure;

    fn from_str(text: &str) -> Result<Self, DeviceFailure> {
        named("emulated model", Architecture::ALL, Architecture::name, text)
    }
}
